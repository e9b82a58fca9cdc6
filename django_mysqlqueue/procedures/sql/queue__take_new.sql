-- Take messages of a partition, whose row of queue_offsets is locked, above its position.
CREATE PROCEDURE queue__take_new(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}}, IN p_me {{key}}, IN p_token BIGINT, IN p_now BIGINT,
  IN p_until BIGINT, IN p_want INT, IN p_options TEXT {{bytewise}}, OUT p_taken INT
)
  {{attributes}}
BEGIN
  DECLARE v_claimed, v_position, v_offset, v_expires_at BIGINT;
  DECLARE v_target {{group}};
  DECLARE v_coalesce_key {{key}};
  DECLARE v_found, v_expired LONGTEXT {{bytewise}} DEFAULT '';
  DECLARE v_place, v_rows INT DEFAULT 0;
  DECLARE v_rounds INT DEFAULT 1;
  DECLARE v_end BOOL DEFAULT FALSE;
  DECLARE v_look_at INT DEFAULT p_want + {{look_ahead}};
  DECLARE found CURSOR FOR
    SELECT `offset`, target_group, expires_at, coalesce_key FROM queue_messages FORCE INDEX (queue_messages_partition)
    WHERE topic = p_topic AND partition_key = p_key AND `offset` > v_position ORDER BY `offset` LIMIT v_look_at;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  SET p_taken = 0;
  SELECT offset_claimed INTO v_claimed FROM queue_offsets
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  -- Rows above the position are those of a claim that was killed, and whose client has committed it.
  SELECT GREATEST(v_claimed, COALESCE(MAX(message_offset), 0)) INTO v_position
  FROM queue_delivery_state FORCE INDEX (PRIMARY)
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  more: LOOP
    SET v_rows = 0, v_end = FALSE;
    OPEN found;
    walk: LOOP
      FETCH found INTO v_offset, v_target, v_expires_at, v_coalesce_key;
      IF v_end THEN
        LEAVE walk;
      END IF;
      SET v_rows = v_rows + 1;
      IF v_target IN ('', p_group) THEN
        IF p_taken = p_want THEN
          LEAVE walk;
        END IF;
        IF v_coalesce_key <> '' THEN
          CALL queue__refuse('A message has a coalesce key, which only subscribers in Python apply');
        END IF;
        SET v_found = CONCAT(v_found, IF(v_found = '', '', ','), v_offset);
        IF v_expires_at <= p_now THEN
          SET v_expired = CONCAT(v_expired, IF(v_expired = '', '', ','), '[', v_offset, ',', v_expires_at, ']');
        ELSE
          SET p_taken = p_taken + 1;
        END IF;
      END IF;
      SET v_position = v_offset;
    END LOOP;
    CLOSE found;
    -- Further on, if all of these were for other groups, or have expired.
    IF p_taken > 0 OR v_rows < v_look_at OR v_rounds = {{rounds}} THEN
      LEAVE more;
    END IF;
    SET v_look_at = {{max_claim}}, v_rounds = v_rounds + 1;
  END LOOP;
  -- One statement for all rows, and at once the position: no row is above it, whatever happens to the connection.
  INSERT INTO queue_delivery_state
    (consumer_group, topic, partition_key, message_offset, delivery_token, delivered_by, delivered_at, invisible_until)
  SELECT p_group, p_topic, p_key, r.message_offset, p_token, p_me, p_now, p_until
  FROM JSON_TABLE(CONCAT('[', v_found, ']'), '$[*]' COLUMNS (message_offset BIGINT PATH '$')) r;
  IF v_position > v_claimed THEN
    UPDATE queue_offsets SET offset_claimed = v_position, updated_at = {{now}}
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  END IF;
  SET v_expired = CONCAT('[', v_expired, ']');
  WHILE v_place < JSON_LENGTH(v_expired) DO
    CALL queue__expire(
      p_group, p_topic, p_key, JSON_EXTRACT(v_expired, CONCAT('$[', v_place, '][0]')) + 0, 0, p_me,
      JSON_EXTRACT(v_expired, CONCAT('$[', v_place, '][1]')) + 0, p_options);
    SET v_place = v_place + 1;
  END WHILE;
END
