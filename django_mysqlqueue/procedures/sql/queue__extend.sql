-- Hold a delivery for longer: see queue_extend.
CREATE PROCEDURE queue__extend(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}}, IN p_seconds DOUBLE
)
  {{attributes}}
BEGIN
  DECLARE v_inside, v_paused BOOL;
  DECLARE v_key, v_by, v_owner {{key}};
  DECLARE v_offset, v_token, v_start BIGINT;
  DECLARE v_mode VARCHAR(10) {{bytewise}};
  DECLARE v_options TEXT {{bytewise}};
  DECLARE v_locked BIGINT;
  DECLARE v_extended, v_acked BOOL DEFAULT FALSE;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  CALL queue__in_transaction(v_inside);
  IF v_inside THEN
    CALL queue__refuse('queue_extend: a transaction is open. Its COMMIT would be too late for other consumers');
  END IF;
  IF p_seconds IS NULL THEN
    CALL queue__refuse('seconds NULL: must be a number of seconds');
  END IF;
  CALL queue__check_delay('seconds', p_seconds);
  CALL queue__parse(p_group, p_topic, p_handle, v_key, v_offset, v_token);
  IF v_key IS NOT NULL THEN
    BEGIN
      {{on_error}};
      {{begin}};
      CALL queue__options(p_group, p_topic, FALSE, v_mode, v_paused, v_start, v_options);
      -- Under the lease's lock: whoever takes the partition over has read the heartbeat before, or will find this one.
      SELECT leased_by INTO v_owner FROM queue_partition_leases
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE;
      CALL queue__clock();
      SELECT delivered_by INTO v_by FROM queue_delivery_state
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key AND message_offset = v_offset
        AND acked = 0 AND delivery_token = v_token;
      IF v_by IS NOT NULL THEN
        -- If a transaction of the client has acked it, nobody else can take it.
        SELECT delivery_token, acked INTO v_locked, v_acked FROM queue_delivery_state
        WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key AND message_offset = v_offset
        FOR UPDATE SKIP LOCKED;
      END IF;
      IF v_by IS NOT NULL AND (v_locked IS NULL OR (v_locked = v_token AND NOT v_acked))
         AND (v_mode = 'shared' OR v_owner = v_by) THEN
        UPDATE queue_delivery_state
        -- What a clock has written that was set back since counts as claimed now. Otherwise, it would count as over.
        SET invisible_until = GREATEST(
              IF(delivered_at > {{now}} + {{clock_step_ms}}, 0, invisible_until),
              {{now}} + IF(v_mode = 'ordered', {{lease_ms}}, ROUND(1000 * p_seconds))),
            delivered_at = LEAST(delivered_at, {{now}})
        WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key AND message_offset = v_offset
          AND v_locked IS NOT NULL;
        CALL queue__beat(p_group, p_topic, v_by, 0);
        SET v_extended = TRUE;
      END IF;
      {{commit}};
    END;
  END IF;
  SELECT IF(v_extended, 'extended', 'stale') AS result;
END
