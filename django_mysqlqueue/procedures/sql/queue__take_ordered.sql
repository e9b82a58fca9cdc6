-- Take messages of a partition of an ordered group: those that were claimed before first, then new ones. The consumer
-- owns the partition until they are settled. Nothing is waited for: what is locked is left to a later claim.
CREATE PROCEDURE queue__take_ordered(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_me {{key}}, IN p_token BIGINT, IN p_now BIGINT,
  IN p_until BIGINT, IN p_want INT, IN p_may_suspect BOOL, IN p_options TEXT {{bytewise}},
  OUT p_taken INT, OUT p_suspect BOOL
)
  {{attributes}}
take: BEGIN
  DECLARE v_owner {{key}};
  DECLARE v_locked, v_offset, v_due, v_at, v_token BIGINT;
  DECLARE v_strict BOOL DEFAULT JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.on_failure')) = 'block';
  DECLARE v_unsettled, v_new, v_alive, v_held INT DEFAULT 0;
  DECLARE v_end, v_closed BOOL DEFAULT FALSE;
  DECLARE v_result VARCHAR(10) {{bytewise}};
  DECLARE unsettled CURSOR FOR
    SELECT message_offset, delivery_token, invisible_until, delivered_at
    FROM queue_delivery_state FORCE INDEX (PRIMARY)
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND acked = 0
    ORDER BY message_offset LIMIT {{max_pending}};
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  SET p_taken = 0, p_suspect = FALSE;
  SELECT leased_by INTO v_owner FROM queue_partition_leases
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key FOR UPDATE SKIP LOCKED;
  SELECT COUNT(*) INTO v_alive FROM queue_subscriber_heartbeats h
  WHERE h.consumer_group = p_group AND h.topic = p_topic AND h.subscriber_name = v_owner AND {{alive}};
  IF v_owner IS NULL OR (v_owner <> p_me AND v_alive) THEN
    LEAVE take;
  END IF;
  -- What this connection has claimed before, and not settled, is in flight. Nothing overtakes it.
  IF v_owner = p_me THEN
    SELECT COUNT(*) INTO v_held FROM queue_delivery_state FORCE INDEX (PRIMARY)
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND acked = 0 AND delivery_token <> 0
      AND delivered_by = p_me AND invisible_until > p_now;
    IF v_held THEN
      LEAVE take;
    END IF;
  END IF;
  SELECT offset_claimed INTO v_locked FROM queue_offsets
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key FOR UPDATE SKIP LOCKED;
  IF v_locked IS NULL THEN
    LEAVE take;
  END IF;
  UPDATE queue_partition_leases SET leased_by = p_me, leased_at = p_now
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  IF v_strict THEN
    SET p_want = 1;
  END IF;
  SET v_end = FALSE;
  OPEN unsettled;
  walk: LOOP
    FETCH unsettled INTO v_offset, v_token, v_due, v_at;
    IF v_end OR p_suspect OR v_closed OR p_taken = p_want THEN
      LEAVE walk;
    END IF;
    SET v_unsettled = v_unsettled + 1;
    CALL queue__take_again(
      p_group, p_topic, p_key, v_offset, 'ordered', p_me, p_token, p_now, p_until, p_may_suspect AND p_taken = 0,
      p_options, v_result);
    SET v_end = FALSE;
    IF v_result = 'taken' THEN
      SET p_taken = p_taken + 1;
    ELSEIF v_result = 'suspect' THEN
      SET p_taken = 1, p_suspect = TRUE;
    ELSEIF v_result IN ('locked', 'left', 'lost') OR (v_strict AND v_result = 'later') THEN
      SET v_closed = TRUE;
    ELSEIF v_result IN ('ended', 'gone') THEN
      SET v_unsettled = v_unsettled - 1;
    END IF;
  END LOOP;
  CLOSE unsettled;
  IF NOT (v_closed OR p_suspect) AND p_taken < p_want AND v_unsettled < {{max_pending}}
     AND NOT (v_strict AND v_unsettled > 0) THEN
    CALL queue__take_new(
      p_group, p_topic, p_key, p_me, p_token, p_now, p_until, p_want - p_taken, p_options, v_new);
    SET p_taken = p_taken + v_new;
  END IF;
  CALL queue__advance(p_group, p_topic, p_key);
  IF p_taken = 0 THEN
    UPDATE queue_partition_leases SET leased_by = ''
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
    CALL queue__let_go(p_group, p_topic, p_key);
  END IF;
END
