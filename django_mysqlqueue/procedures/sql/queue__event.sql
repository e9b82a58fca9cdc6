-- Record the outcome of a delivery.
CREATE PROCEDURE queue__event(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_offset BIGINT, IN p_attempt INT,
  IN p_outcome VARCHAR(20) {{bytewise}}, IN p_delivered_at BIGINT, IN p_by {{key}}, IN p_error LONGTEXT {{bytewise}},
  IN p_related {{key}}, IN p_options TEXT {{bytewise}}
)
  {{attributes}}
BEGIN
  DECLARE v_record VARCHAR(10) {{bytewise}} DEFAULT JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.record'));
  IF v_record = 'all' OR (v_record = 'failures' AND p_outcome NOT IN ('acked', 'snoozed', 'expired')) THEN
    INSERT INTO queue_delivery_events
      (consumer_group, topic, partition_key, message_offset, attempt, outcome, delivered_at, handled_ms, settled_by,
       error, related_id, settled_at)
    VALUES
      (p_group, p_topic, p_key, p_offset, p_attempt, p_outcome, p_delivered_at,
       IF(p_outcome IN ('acked', 'failed', 'snoozed', 'dead_lettered') AND p_delivered_at > 0,
          GREATEST(0, {{now}} - p_delivered_at), 0),
       p_by, p_error, p_related, {{now}});
  END IF;
END
