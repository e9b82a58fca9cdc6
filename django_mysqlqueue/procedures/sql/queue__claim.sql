-- The transaction of a claim. p_taken: number of messages, which then have p_token.
CREATE PROCEDURE queue__claim(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_limit INT, IN p_keys LONGTEXT {{bytewise}}, IN p_me {{key}},
  IN p_token BIGINT, OUT p_taken INT, OUT p_until BIGINT
)
  {{attributes}}
BEGIN
  DECLARE v_mode VARCHAR(10) {{bytewise}};
  DECLARE v_paused BOOL;
  DECLARE v_start, v_now, v_offset, v_locked BIGINT;
  DECLARE v_options TEXT {{bytewise}};
  DECLARE v_key {{key}};
  DECLARE v_result VARCHAR(10) {{bytewise}};
  DECLARE v_new INT DEFAULT 0;
  DECLARE v_suspect, v_end BOOL DEFAULT FALSE;
  -- Now and then: a clock that was corrected since may have left rows far in the future.
  DECLARE v_looks_ahead BOOL DEFAULT RAND() < {{looks_ahead}};
  DECLARE due CURSOR FOR
    SELECT partition_key, message_offset FROM queue_delivery_state FORCE INDEX (queue_delivery_state_due)
    WHERE consumer_group = p_group AND topic = p_topic AND acked = 0
      AND invisible_until <= IF(v_looks_ahead, {{latest}}, v_now)
      AND (invisible_until <= v_now OR delivered_at > v_now + {{clock_step_ms}})
    ORDER BY invisible_until LIMIT {{page}};
  DECLARE chosen CURSOR FOR
    SELECT k.partition_key
    FROM JSON_TABLE(p_keys, '$[*]' COLUMNS (place FOR ORDINALITY, partition_key {{key}} PATH '$')) k ORDER BY k.place;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  {{on_error}};
  SET p_taken = 0, p_until = 0;
  SET @queue__expired = 0, @queue__dead_lettered = 0;
  {{begin}};
  CALL queue__options(p_group, p_topic, TRUE, v_mode, v_paused, v_start, v_options);
  IF v_mode IS NOT NULL AND NOT v_paused THEN
    CALL queue__clock();
    SET v_now = {{now}};
    SET p_until = v_now + IF(
      v_mode = 'ordered', {{lease_ms}}, ROUND(1000 * JSON_UNQUOTE(JSON_EXTRACT(v_options, '$.visibility_timeout'))));
    IF v_mode = 'shared' THEN
      SET v_end = FALSE;
      OPEN due;
      walk: LOOP
        FETCH due INTO v_key, v_offset;
        IF v_end OR v_suspect OR p_taken = p_limit THEN
          LEAVE walk;
        END IF;
        CALL queue__take_again(
          p_group, p_topic, v_key, v_offset, v_mode, p_me, p_token, v_now, p_until, p_taken = 0, v_options, v_result);
        SET v_end = FALSE;
        SET p_taken = p_taken + (v_result IN ('taken', 'suspect')), v_suspect = v_result = 'suspect';
        IF v_result = 'ended' THEN
          SET v_locked = NULL;
          SELECT offset_acked INTO v_locked FROM queue_offsets
          WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
          IF v_locked IS NOT NULL THEN
            CALL queue__advance(p_group, p_topic, v_key);
          END IF;
          SET v_end = FALSE;
        END IF;
      END LOOP;
      CLOSE due;
    END IF;
    OPEN chosen;
    walk: LOOP
      SET v_end = FALSE, v_new = 0;
      FETCH chosen INTO v_key;
      IF v_end OR v_suspect OR p_taken = p_limit THEN
        LEAVE walk;
      END IF;
      IF v_mode = 'ordered' THEN
        CALL queue__take_ordered(
          p_group, p_topic, v_key, p_me, p_token, v_now, p_until, p_limit - p_taken, p_taken = 0, v_options, v_new,
          v_suspect);
      ELSE
        SET v_locked = NULL;
        SELECT offset_acked INTO v_locked FROM queue_offsets
        WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
        IF v_locked IS NOT NULL THEN
          CALL queue__take_new(
            p_group, p_topic, v_key, p_me, p_token, v_now, p_until, p_limit - p_taken, v_options, v_new);
          CALL queue__advance(p_group, p_topic, v_key);
        END IF;
      END IF;
      SET p_taken = p_taken + v_new;
    END LOOP;
    CLOSE chosen;
    -- At the end: subscribers and outcomes wait for the rows of the counts while they hold other locks.
    IF @queue__expired > 0 THEN
      CALL queue__count(p_group, p_topic, 'expired', @queue__expired, 0);
    END IF;
    IF @queue__dead_lettered > 0 THEN
      CALL queue__count(p_group, p_topic, 'dead_lettered', @queue__dead_lettered, 0);
    END IF;
  END IF;
  {{commit}};
END
