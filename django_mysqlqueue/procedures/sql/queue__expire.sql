-- Settle a message that has expired before an attempt has started; its row is locked, or was inserted just now.
-- The claim counts it.
CREATE PROCEDURE queue__expire(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_offset BIGINT, IN p_attempts INT, IN p_me {{key}},
  IN p_expires_at BIGINT, IN p_options TEXT {{bytewise}}
)
  {{attributes}}
BEGIN
  IF JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.on_expiry')) = 'dead_letter'
     AND RIGHT(p_topic, CHAR_LENGTH({{dlq_suffix}})) <> {{dlq_suffix}} THEN
    CALL queue__dead_letter(
      p_group, p_topic, p_key, p_offset, p_attempts, 0, p_me,
      CONCAT('The message expired at ',
             TIMESTAMPADD(MICROSECOND, GREATEST(p_expires_at, 0) * 1000, '1970-01-01 00:00:00'),
             ' UTC, before attempt ', p_attempts + 1, ' had started.'), p_options);
    SET @queue__dead_lettered = @queue__dead_lettered + 1;
  ELSE
    UPDATE queue_delivery_state SET acked = 1, delivery_token = 0, suspect = 0, delivered_by = ''
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
    CALL queue__event(p_group, p_topic, p_key, p_offset, 0, 'expired', 0, p_me, '', '', p_options);
    SET @queue__expired = @queue__expired + 1;
  END IF;
END
