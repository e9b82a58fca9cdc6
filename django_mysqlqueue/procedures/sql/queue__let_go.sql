-- Give a partition, whose lease and row of queue_offsets are locked, back as soon as nothing of it is held: delete the
-- lease if it is drained, and leave it without an owner otherwise.
CREATE PROCEDURE queue__let_go(IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}})
  {{attributes}}
BEGIN
  DECLARE v_acked, v_claimed, v_last BIGINT;
  DECLARE v_rows, v_held INT;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  SELECT COUNT(*), COUNT(IF(acked = 0 AND delivery_token <> 0, 1, NULL)) INTO v_rows, v_held
  FROM queue_delivery_state FORCE INDEX (PRIMARY)
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  IF v_held = 0 THEN
    SELECT offset_acked, offset_claimed INTO v_acked, v_claimed FROM queue_offsets
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
    SELECT MAX(`offset`) INTO v_last FROM queue_messages WHERE topic = p_topic AND partition_key = p_key;
    IF v_rows = 0 AND v_acked = v_claimed AND COALESCE(v_last, 0) <= v_claimed THEN
      DELETE FROM queue_partition_leases
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
    ELSE
      UPDATE queue_partition_leases SET leased_by = '', leased_at = {{now}}
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
    END IF;
  END IF;
END
