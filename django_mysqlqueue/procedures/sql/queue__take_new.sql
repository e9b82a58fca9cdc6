-- Take messages of a partition, whose row of queue_offsets is locked, above its position.
CREATE PROCEDURE queue__take_new(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_me {{key}}, IN p_token BIGINT, IN p_now BIGINT,
  IN p_until BIGINT, IN p_want INT, IN p_options TEXT {{bytewise}}, OUT p_taken INT
)
  {{attributes}}
BEGIN
  DECLARE v_claimed, v_position, v_offset, v_created_at, v_expires_at BIGINT;
  DECLARE v_target {{group}};
  DECLARE v_original_id {{key}};
  DECLARE v_metadata MEDIUMTEXT {{bytewise}};
  DECLARE v_end BOOL DEFAULT FALSE;
  DECLARE v_look_at INT DEFAULT p_want + {{look_ahead}};
  DECLARE found CURSOR FOR
    SELECT `offset`, target_group, IF(metadata LIKE '%"mysqlqueue.%', metadata, ''), created_at, original_id
    FROM queue_messages FORCE INDEX (queue_messages_partition)
    WHERE topic = p_topic AND partition_key = p_key AND `offset` > v_claimed ORDER BY `offset` LIMIT v_look_at;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  SET p_taken = 0;
  SELECT offset_claimed INTO v_claimed FROM queue_offsets
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  SET v_position = v_claimed;
  OPEN found;
  walk: LOOP
    FETCH found INTO v_offset, v_target, v_metadata, v_created_at, v_original_id;
    IF v_end THEN
      LEAVE walk;
    END IF;
    IF v_target IN ('', p_group) THEN
      IF p_taken = p_want THEN
        LEAVE walk;
      END IF;
      SET v_expires_at = NULL;
      IF v_metadata <> '' THEN
        CALL queue__expiry(v_metadata, v_created_at, v_original_id, v_expires_at);
      END IF;
      INSERT INTO queue_delivery_state
        (consumer_group, topic, partition_key, message_offset, delivery_token, delivered_by, delivered_at, invisible_until)
      VALUES (p_group, p_topic, p_key, v_offset, p_token, p_me, p_now, p_until);
      IF v_expires_at <= p_now THEN
        CALL queue__expire(p_group, p_topic, p_key, v_offset, 0, p_me, v_expires_at, p_options);
      ELSE
        SET p_taken = p_taken + 1;
      END IF;
    END IF;
    SET v_position = v_offset;
  END LOOP;
  CLOSE found;
  IF v_position > v_claimed THEN
    UPDATE queue_offsets SET offset_claimed = v_position, updated_at = {{now}}
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  END IF;
END
