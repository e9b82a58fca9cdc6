-- Send the heartbeat of a consumer, if the last one is p_age milliseconds old.
CREATE PROCEDURE queue__beat(IN p_group {{group}}, IN p_topic {{topic}}, IN p_me {{key}}, IN p_age INT)
  {{attributes}}
BEGIN
  DECLARE v_now BIGINT DEFAULT {{now}};
  DECLARE v_recent INT;
  SELECT COUNT(*) INTO v_recent FROM queue_subscriber_heartbeats
  WHERE consumer_group = p_group AND topic = p_topic AND subscriber_name = p_me AND deregistered_at = 0
    AND heartbeat_at > v_now - p_age AND heartbeat_at <= v_now;
  IF v_recent = 0 THEN
    -- MariaDB writes a variable into JSON as a string, but a sum as a number.
    INSERT INTO queue_subscriber_heartbeats (consumer_group, topic, subscriber_name, heartbeat_at, info)
    VALUES (p_group, p_topic, p_me, v_now, JSON_OBJECT('client', 'sql', 'host', SUBSTRING_INDEX(USER(), '@', -1),
                                                        'version', '{{version}}', 'started_at', v_now + 0))
    ON DUPLICATE KEY UPDATE heartbeat_at = v_now, deregistered_at = 0;
  END IF;
END
