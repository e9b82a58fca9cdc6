-- Send the heartbeat of a consumer, if the last one is a sixth of a lease old.
CREATE PROCEDURE queue__beat(IN p_group {{group}}, IN p_topic {{topic}}, IN p_me {{key}})
  {{attributes}}
BEGIN
  DECLARE v_now BIGINT DEFAULT {{now}};
  IF NOT EXISTS (
    SELECT 1 FROM queue_subscriber_heartbeats
    WHERE consumer_group = p_group AND topic = p_topic AND subscriber_name = p_me AND deregistered_at = 0
      AND heartbeat_at BETWEEN v_now - {{lease_ms}} DIV 6 AND v_now + {{lease_ms}} DIV 6
  ) THEN
    INSERT INTO queue_subscriber_heartbeats (consumer_group, topic, subscriber_name, heartbeat_at, info)
    VALUES (p_group, p_topic, p_me, v_now, JSON_OBJECT('client', 'sql', 'host', SUBSTRING_INDEX(USER(), '@', -1),
                                                        'version', '{{version}}'))
    ON DUPLICATE KEY UPDATE heartbeat_at = v_now, deregistered_at = 0;
  END IF;
END
