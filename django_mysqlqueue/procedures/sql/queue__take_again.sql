-- Take a message that was claimed before, if it may start now. p_result:
--   taken, suspect   it is in this claim, as a suspected poison message in the second case
--   later            it waits
--   lost             it waits since a subscriber was lost with it: in ordered mode it holds its partition
--   ended            it is settled: dead-lettered, expired, or deleted from the log
--   left             it is a suspected poison message, which this claim may not take
--   locked, gone     another transaction has locked it, or it is settled already
CREATE PROCEDURE queue__take_again(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_offset BIGINT, IN p_mode VARCHAR(10) {{bytewise}},
  IN p_me {{key}}, IN p_token BIGINT, IN p_now BIGINT, IN p_until BIGINT, IN p_may_suspect BOOL,
  IN p_options TEXT {{bytewise}}, OUT p_result VARCHAR(10) {{bytewise}}
)
  {{attributes}}
BEGIN
  DECLARE v_due, v_token, v_at, v_expires_at BIGINT;
  DECLARE v_by, v_coalesce_key {{key}};
  DECLARE v_retries, v_max_attempts, v_there INT;
  DECLARE v_error LONGTEXT {{bytewise}};
  DECLARE v_suspect BOOL;
  DECLARE v_found BOOL DEFAULT TRUE;
  DECLARE v_wait DOUBLE DEFAULT 0;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_found = FALSE;
  SELECT invisible_until, delivery_token, suspect, delivered_by, delivered_at, retry_count, last_error
  INTO v_due, v_token, v_suspect, v_by, v_at, v_retries, v_error FROM queue_delivery_state
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset
    AND acked = 0
  FOR UPDATE SKIP LOCKED;
  IF NOT v_found THEN
    SELECT COUNT(*) INTO v_there FROM queue_delivery_state
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset
      AND acked = 0;
    SET p_result = IF(v_there, 'locked', 'gone');
  ELSEIF v_due > p_now AND v_at <= p_now + {{clock_step_ms}} AND (p_mode = 'shared' OR v_token = 0) THEN
    SET p_result = IF(v_token = 0 AND v_by <> '', 'lost', 'later');
  ELSE
    SELECT expires_at, coalesce_key INTO v_expires_at, v_coalesce_key FROM queue_messages WHERE `offset` = p_offset;
    SET v_max_attempts = NULLIF(JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.max_attempts')), 'null');
    IF v_by <> '' AND v_suspect AND v_retries > 0 THEN
      CALL queue__backoff(v_retries, p_options, v_wait);
    END IF;
    IF NOT v_found THEN
      UPDATE queue_delivery_state SET acked = 1, delivery_token = 0, suspect = 0, delivered_by = ''
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
      CALL queue__event(p_group, p_topic, p_key, p_offset, v_retries + 1, 'deleted', 0, p_me, '', '', p_options);
      SET p_result = 'ended';
    ELSEIF v_by <> '' AND v_retries >= v_max_attempts
           AND RIGHT(p_topic, CHAR_LENGTH({{dlq_suffix}})) <> {{dlq_suffix}} THEN
      CALL queue__dead_letter(
        p_group, p_topic, p_key, p_offset, v_retries, v_at, v_by,
        CONCAT(v_error, IF(v_error = '', '', CHAR(10 USING utf8mb4)), 'The subscriber ''', v_by,
               ''' was lost while it handled attempt ', v_retries, '.'), p_options);
      SET @queue__dead_lettered = @queue__dead_lettered + 1;
      SET p_result = 'ended';
    ELSEIF v_wait > 0 THEN
      UPDATE queue_delivery_state
      SET delivery_token = 0, suspect = 0, delivered_at = p_now, invisible_until = p_now + ROUND(v_wait)
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
      CALL queue__event(p_group, p_topic, p_key, p_offset, v_retries, 'lost', v_at, v_by, '', '', p_options);
      SET p_result = 'lost';
    ELSEIF v_by <> '' AND NOT p_may_suspect THEN
      SET p_result = 'left';
    ELSE
      IF v_coalesce_key <> '' THEN
        CALL queue__refuse('A message has a coalesce key, which only subscribers in Python apply');
      END IF;
      IF v_token <> 0 THEN
        CALL queue__event(p_group, p_topic, p_key, p_offset, v_retries, 'lost', v_at, v_by, '', '', p_options);
      END IF;
      IF v_expires_at <= p_now THEN
        CALL queue__expire(p_group, p_topic, p_key, p_offset, v_retries, p_me, v_expires_at, p_options);
        SET p_result = 'ended';
      ELSE
        -- The start of a suspected poison message is recorded: if it is lost, too, that was an attempt.
        UPDATE queue_delivery_state
        SET delivery_token = p_token, suspect = v_by <> '', retry_count = v_retries + (v_by <> ''),
            delivered_by = p_me, delivered_at = p_now, invisible_until = p_until
        WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
        SET p_result = IF(v_by = '', 'taken', 'suspect');
      END IF;
    END IF;
  END IF;
END
