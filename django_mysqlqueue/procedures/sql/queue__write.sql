-- Write the outcome of one delivery, if its token is still the row's. p_result: the new state, or stale.
--   p_inside   whether in a transaction of the client
--   p_delay    milliseconds; NULL: the backoff
--   p_by       whose delivery it was
--   p_latency  milliseconds since the message entered the log; NULL: it was acked before
CREATE PROCEDURE queue__write(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_offset BIGINT, IN p_token BIGINT,
  IN p_action VARCHAR(10) {{bytewise}}, IN p_error LONGTEXT {{bytewise}}, IN p_delay BIGINT,
  IN p_options TEXT {{bytewise}}, IN p_inside BOOL, OUT p_result VARCHAR(20) {{bytewise}},
  OUT p_by {{key}}, OUT p_latency BIGINT
)
  {{attributes}}
BEGIN
  DECLARE v_acked, v_found BOOL DEFAULT TRUE;
  DECLARE v_suspect BOOL;
  DECLARE v_token, v_at BIGINT;
  DECLARE v_retries, v_attempt, v_max_attempts INT;
  DECLARE v_delay DOUBLE DEFAULT p_delay;
  DECLARE v_error LONGTEXT {{bytewise}} DEFAULT IF(
    CHAR_LENGTH(p_error) <= {{error_length}}, p_error, CONCAT('…', RIGHT(p_error, {{error_length}} - 1)));
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_found = FALSE;
  -- First without a lock: for a stale handle, the transaction of whoever has the message now is not waited for.
  SELECT acked, delivery_token INTO v_acked, v_token FROM queue_delivery_state
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
  IF v_found AND NOT v_acked AND v_token = p_token THEN
    SELECT acked, delivery_token, suspect, delivered_by, delivered_at, retry_count
    INTO v_acked, v_token, v_suspect, p_by, v_at, v_retries
    FROM queue_delivery_state
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset
    FOR UPDATE;
  END IF;
  CALL queue__clock();  -- The lock may have been waited for.
  IF v_found AND v_acked AND v_token = p_token AND p_action = 'ack' AND NOT p_inside THEN
    -- A second ack of the same delivery. In a transaction, it is stale: its effects would be there twice.
    SET p_result = 'acked', p_latency = NULL;
  ELSEIF NOT v_found OR v_acked OR v_token <> p_token THEN
    SET p_result = 'stale';
  ELSE
    -- The start of a suspected poison message was counted when it was claimed.
    SET v_attempt = v_retries + (NOT v_suspect);
    SET v_max_attempts = NULLIF(JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.max_attempts')), 'null');
    IF p_action = 'ack' THEN
      UPDATE queue_delivery_state SET acked = 1
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
      SELECT GREATEST(0, {{now}} - published_at) INTO p_latency FROM queue_messages WHERE `offset` = p_offset;
      CALL queue__event(p_group, p_topic, p_key, p_offset, v_attempt, 'acked', v_at, p_by, '', '', p_options);
      SET p_result = 'acked', p_latency = COALESCE(p_latency, 0);
    ELSEIF RIGHT(p_topic, CHAR_LENGTH({{dlq_suffix}})) <> {{dlq_suffix}}
           AND (p_action = 'reject' OR (p_action = 'nack' AND v_attempt >= v_max_attempts)) THEN
      CALL queue__dead_letter(p_group, p_topic, p_key, p_offset, v_attempt, v_at, p_by, v_error, p_options);
      SET p_result = 'dead_lettered';
    ELSE
      IF v_delay IS NULL THEN
        CALL queue__backoff(v_attempt, p_options, v_delay);
      END IF;
      UPDATE queue_delivery_state
      SET delivery_token = 0, suspect = 0, delivered_by = '', delivered_at = {{now}},
          invisible_until = IF(v_delay > 0, {{now}} + ROUND(v_delay), 0),
          retry_count = IF(p_action = 'snooze', v_attempt - 1, v_attempt),
          last_error = IF(p_action = 'snooze', last_error, v_error)
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
      SET p_result = IF(p_action = 'snooze', 'snoozed', 'failed');
      CALL queue__event(p_group, p_topic, p_key, p_offset, v_attempt, p_result, v_at, p_by, v_error, '', p_options);
    END IF;
  END IF;
END
