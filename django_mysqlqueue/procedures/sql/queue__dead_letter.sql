-- Settle a delivery whose row is locked, and put a copy of its message into the outbox for the DLQ. The copy never
-- expires, and has no coalesce key.
CREATE PROCEDURE queue__dead_letter(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_offset BIGINT, IN p_attempts INT,
  IN p_delivered_at BIGINT, IN p_by {{key}}, IN p_error LONGTEXT {{bytewise}}, IN p_options TEXT {{bytewise}}
)
  {{attributes}}
BEGIN
  DECLARE v_id {{key}} DEFAULT UUID();
  DECLARE v_error LONGTEXT {{bytewise}} DEFAULT IF(
    CHAR_LENGTH(p_error) <= {{error_length}}, p_error, CONCAT('…', RIGHT(p_error, {{error_length}} - 1)));
  -- The copy first: if it is killed in between, and the client commits, the message is not lost.
  INSERT INTO queue_outbox
    (topic, partition_key, id, payload, metadata, publisher_key, created_at, original_id, original_topic,
     original_offset, failed_group, failed_at, failure_count, last_error)
  SELECT CONCAT(p_topic, {{dlq_suffix}}), m.partition_key, v_id, m.payload, m.metadata, m.publisher_key, {{now}},
         IF(m.original_id = '', m.id, m.original_id), IF(m.original_topic = '', m.topic, m.original_topic),
         IF(m.original_offset = 0, m.`offset`, m.original_offset), p_group, {{now}}, p_attempts, v_error
  FROM queue_messages m WHERE m.`offset` = p_offset;
  UPDATE queue_delivery_state
  SET acked = 1, delivery_token = 0, suspect = 0, delivered_by = '', retry_count = p_attempts
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = p_offset;
  CALL queue__event(
    p_group, p_topic, p_key, p_offset, p_attempts, 'dead_lettered', p_delivered_at, p_by, v_error, v_id, p_options);
END
