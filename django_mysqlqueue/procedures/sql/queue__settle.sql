-- Write the outcome of a delivery: in the client's transaction, or in one of its own, which then moves the watermark
-- and gives the partition back. In the first case, the next claim does that. p_delay: seconds; NULL: the backoff.
CREATE PROCEDURE queue__settle(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}},
  IN p_action VARCHAR(10) {{bytewise}},
  IN p_error LONGTEXT {{bytewise}}, IN p_delay DOUBLE
)
  {{attributes}}
BEGIN
  DECLARE v_inside, v_paused BOOL;
  DECLARE v_key, v_by, v_owner {{key}};
  DECLARE v_offset, v_token, v_start, v_latency, v_locked BIGINT;
  DECLARE v_mode VARCHAR(10) {{bytewise}};
  DECLARE v_options TEXT {{bytewise}};
  DECLARE v_result VARCHAR(20) {{bytewise}} DEFAULT 'stale';
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  IF p_action = 'snooze' AND p_delay IS NULL THEN
    CALL queue__refuse('delay NULL: must be a number of seconds');
  END IF;
  CALL queue__check_delay('delay', p_delay);
  SET p_error = COALESCE(p_error, '');
  CALL queue__in_transaction(v_inside);
  CALL queue__parse(p_group, p_topic, p_handle, v_key, v_offset, v_token);
  IF v_key IS NOT NULL THEN
    IF v_inside THEN
      BEGIN
        DECLARE EXIT HANDLER FOR SQLEXCEPTION
        BEGIN
          ROLLBACK TO SAVEPOINT queue__settle;
          RESIGNAL;
        END;
        SAVEPOINT queue__settle;
        CALL queue__options(p_group, p_topic, FALSE, v_mode, v_paused, v_start, v_options);
        CALL queue__write(
          p_group, p_topic, v_key, v_offset, v_token, p_action, p_error, ROUND(1000 * p_delay), v_options, TRUE,
          v_result, v_by, v_latency);
        RELEASE SAVEPOINT queue__settle;
      END;
    ELSE
      BEGIN
        {{on_error}};
        {{begin}};
        CALL queue__options(p_group, p_topic, FALSE, v_mode, v_paused, v_start, v_options);
        -- The only lock that it waits for. It holds no other meanwhile.
        CALL queue__write(
          p_group, p_topic, v_key, v_offset, v_token, p_action, p_error, ROUND(1000 * p_delay), v_options, FALSE,
          v_result, v_by, v_latency);
        IF v_result <> 'stale' THEN
          IF v_mode = 'ordered' THEN
            SELECT leased_by INTO v_owner FROM queue_partition_leases
            WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
          END IF;
          SELECT offset_acked INTO v_locked FROM queue_offsets
          WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
          IF v_locked IS NOT NULL AND v_result IN ('acked', 'dead_lettered') THEN
            CALL queue__advance(p_group, p_topic, v_key);
          END IF;
          IF v_locked IS NOT NULL AND v_owner = v_by THEN
            CALL queue__let_go(p_group, p_topic, v_key);
          END IF;
          IF v_result <> 'acked' OR v_latency IS NOT NULL THEN
            CALL queue__count(p_group, p_topic, v_result, 1, v_latency);
          END IF;
        END IF;
        {{commit}};
      END;
    END IF;
  END IF;
  SELECT v_result AS result;
END
