-- Claim messages, and return them: see queue_claim.
CREATE PROCEDURE queue__deliver(IN p_group {{group}}, IN p_topic {{topic}}, IN p_limit INT)
  {{attributes}}
BEGIN
  DECLARE v_inside, v_paused BOOL;
  DECLARE v_mode VARCHAR(10) {{bytewise}};
  DECLARE v_start, v_until BIGINT;
  DECLARE v_token BIGINT DEFAULT 0;
  DECLARE v_taken, v_attempts INT DEFAULT 0;
  DECLARE v_again BOOL;
  DECLARE v_options TEXT {{bytewise}};
  DECLARE v_keys, v_missing LONGTEXT {{bytewise}};
  DECLARE v_me {{key}} DEFAULT LEFT(CONCAT('sql:', CONNECTION_ID(), ':', USER()), {{key_length}});
  IF @@autocommit = 0 THEN
    CALL queue__refuse(
      'queue_claim: autocommit is off in this session. SET autocommit = 1, and begin transactions yourself');
  END IF;
  CALL queue__in_transaction(v_inside);
  IF v_inside THEN
    CALL queue__refuse('queue_claim: a transaction is open. Claim first, and begin it for your work and the ack');
  END IF;
  IF p_limit IS NULL OR p_limit NOT BETWEEN 1 AND {{max_claim}} THEN
    CALL queue__refuse(CONCAT('limit ', COALESCE(p_limit, 'NULL'), ': must be 1 to {{max_claim}}'));
  END IF;
  CALL queue__options(p_group, p_topic, TRUE, v_mode, v_paused, v_start, v_options);
  IF v_mode IS NULL THEN
    CALL queue__refuse(
      CONCAT('There is no consumer group ', COALESCE(p_group, 'NULL'), ' on ', COALESCE(p_topic, 'NULL')));
  END IF;
  IF NOT v_paused THEN
    WHILE v_token = 0 DO
      SET v_token = CAST(CONV(HEX(RANDOM_BYTES(8)), 16, 10) AS UNSIGNED) & 9223372036854775807;
    END WHILE;
    attempt: LOOP
      SET v_again = FALSE;
      BEGIN
        DECLARE EXIT HANDLER FOR 1213  -- a deadlock
        BEGIN
          SET v_again = TRUE, v_attempts = v_attempts + 1;
          IF v_attempts = 3 THEN
            RESIGNAL;
          END IF;
        END;
        CALL queue__clock();
        CALL queue__sweep(p_group, p_topic, v_mode);
        CALL queue__beat(p_group, p_topic, v_me, {{lease_ms}} DIV 6);
        CALL queue__find(p_group, p_topic, v_mode, v_me, v_start, p_limit + {{spare}},
          JSON_UNQUOTE(JSON_EXTRACT(v_options, '$.on_failure')) = 'block', v_keys, v_missing);
        IF JSON_LENGTH(v_missing) > 0 THEN
          CALL queue__prepare(p_group, p_topic, v_missing);
        END IF;
        CALL queue__claim(p_group, p_topic, p_limit, v_keys, v_me, v_token, v_taken, v_until);
      END;
      IF NOT v_again THEN
        LEAVE attempt;
      END IF;
    END LOOP;
    IF v_taken > 0 AND v_mode = 'ordered' THEN
      CALL queue__clock();
      CALL queue__beat(p_group, p_topic, v_me, 0);  -- It is the owner until v_until.
    END IF;
  END IF;
  SELECT CONCAT(m.`offset`, ':', s.delivery_token) AS handle,
         m.id,
         {{publisher_key}} AS `key`,
         m.priority,
         m.payload,
         CAST(JSON_REMOVE(m.metadata, '$."{{replaces}}"') AS CHAR CHARACTER SET utf8mb4) AS metadata,
         CAST(s.retry_count + (NOT s.suspect) AS SIGNED) AS attempt,
         m.`offset`,
         m.created_at,
         s.invisible_until AS invisible_until
  FROM queue_delivery_state s FORCE INDEX (queue_delivery_state_due)
  STRAIGHT_JOIN queue_messages m FORCE INDEX (PRIMARY) ON m.`offset` = s.message_offset
  WHERE v_taken > 0 AND s.consumer_group = p_group AND s.topic = p_topic AND s.acked = 0 AND s.invisible_until = v_until
    AND s.delivery_token = v_token
  ORDER BY m.priority DESC, s.partition_key, s.message_offset;
END
