-- Create missing rows of queue_offsets and leases. Apart from the claim, and in order of key: an INSERT that meets that
-- of another transaction waits for it.
CREATE PROCEDURE queue__prepare(IN p_group {{group}}, IN p_topic {{topic}}, IN p_keys LONGTEXT {{bytewise}})
  {{attributes}}
BEGIN
  DECLARE v_mode VARCHAR(10) {{bytewise}};
  DECLARE v_paused BOOL;
  DECLARE v_start BIGINT;
  DECLARE v_options TEXT {{bytewise}};
  {{on_error}};
  {{begin}};
  CALL queue__options(p_group, p_topic, TRUE, v_mode, v_paused, v_start, v_options);
  IF v_mode IS NOT NULL AND NOT v_paused THEN
    IF v_mode = 'ordered' THEN
      INSERT INTO queue_partition_leases (consumer_group, topic, partition_key, leased_by, leased_at)
      SELECT p_group, p_topic, k.partition_key, '', {{now}}
      FROM JSON_TABLE(p_keys, '$[*]' COLUMNS (partition_key {{key}} PATH '$')) k ORDER BY k.partition_key
      ON DUPLICATE KEY UPDATE consumer_group = p_group;
    END IF;
    INSERT INTO queue_offsets (consumer_group, topic, partition_key, offset_acked, offset_claimed, updated_at)
    SELECT p_group, p_topic, k.partition_key, v_start, v_start, {{now}}
    FROM JSON_TABLE(p_keys, '$[*]' COLUMNS (partition_key {{key}} PATH '$')) k ORDER BY k.partition_key
    ON DUPLICATE KEY UPDATE consumer_group = p_group;
  END IF;
  {{commit}};
END
