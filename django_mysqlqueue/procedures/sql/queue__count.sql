-- Add to the counts of the current minute and hour. p_latency: milliseconds since an acked message entered the log.
CREATE PROCEDURE queue__count(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_outcome VARCHAR(20) {{bytewise}}, IN p_number INT,
  IN p_latency BIGINT
)
  {{attributes}}
BEGIN
  DECLARE v_now BIGINT DEFAULT {{now}};
  DECLARE v_grain INT DEFAULT 60;
  WHILE v_grain <= 3600 DO
    INSERT INTO queue_rollups (grain, bucket_at, consumer_group, topic)
    VALUES (v_grain, v_now DIV (v_grain * 1000) * v_grain * 1000, p_group, p_topic)
    ON DUPLICATE KEY UPDATE consumer_group = p_group;
    UPDATE queue_rollups
    SET acked = acked + IF(p_outcome = 'acked', p_number, 0),
        failed = failed + IF(p_outcome IN ('failed', 'dead_lettered'), p_number, 0),
        dead_lettered = dead_lettered + IF(p_outcome = 'dead_lettered', p_number, 0),
        expired = expired + IF(p_outcome = 'expired', p_number, 0),
        {{count_latency}}
    WHERE grain = v_grain AND bucket_at = v_now DIV (v_grain * 1000) * v_grain * 1000
      AND consumer_group = p_group AND topic = p_topic;
    SET v_grain = v_grain * 60;
  END WHILE;
END
