-- Partitions from which a claim may take messages, as a JSON array, and those of them for which a row of queue_offsets
-- or a lease is missing. In ordered groups, up to p_limit partitions with messages to be redelivered come first; then,
-- by priority, up to p_limit with messages above the position. Within the priority 0, the search begins at the
-- partition of a random message, so that no partition is always the last. If nothing was found the last time in this
-- session, only messages that came since are looked for.
CREATE PROCEDURE queue__find(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_mode VARCHAR(10) {{bytewise}}, IN p_me {{key}}, IN p_start BIGINT,
  IN p_limit INT, IN p_strict BOOL, OUT p_keys LONGTEXT {{bytewise}}, OUT p_missing LONGTEXT {{bytewise}}
)
  {{attributes}}
BEGIN
  DECLARE v_now BIGINT DEFAULT {{now}};
  DECLARE v_low, v_high, v_seen BIGINT;
  DECLARE v_work, v_new BOOL DEFAULT FALSE;
  DECLARE v_place TEXT {{bytewise}};
  DECLARE v_key, v_begin {{key}} DEFAULT '';
  DECLARE v_missing BOOL;
  DECLARE v_end BOOL DEFAULT FALSE;
  -- Now and then: a clock that was corrected since may have left rows far in the future.
  DECLARE v_looks_ahead BOOL DEFAULT RAND() < {{looks_ahead}};
  DECLARE v_step INT DEFAULT 0;
  -- One claim in PRIORITY_SHARE begins with the lowest priorities.
  DECLARE v_low_first BOOL DEFAULT {{priority_share}} > 0 AND RAND() * {{priority_share}} < 1;
  DECLARE due CURSOR FOR
    SELECT DISTINCT s.partition_key, l.leased_by IS NULL
    FROM queue_delivery_state s FORCE INDEX (queue_delivery_state_due)
    LEFT JOIN queue_partition_leases l
      ON l.consumer_group = p_group AND l.topic = p_topic AND l.partition_key = s.partition_key
    LEFT JOIN queue_subscriber_heartbeats h
      ON h.consumer_group = p_group AND h.topic = p_topic AND h.subscriber_name = l.leased_by AND {{alive}}
    WHERE s.consumer_group = p_group AND s.topic = p_topic AND s.acked = 0
      AND s.invisible_until <= IF(v_looks_ahead, {{latest}}, v_now)
      AND (s.invisible_until <= v_now OR s.delivered_at > v_now + {{clock_step_ms}})
      AND (h.subscriber_name IS NULL OR h.subscriber_name = p_me)
      AND NOT EXISTS (
        SELECT 1 FROM queue_delivery_state e FORCE INDEX (PRIMARY)
        WHERE e.consumer_group = p_group AND e.topic = p_topic AND e.partition_key = s.partition_key
          AND e.message_offset < s.message_offset AND {{waits}} AND (p_strict OR e.delivered_by <> '')
      )
    LIMIT {{page}};
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  {{on_error}};
  SET p_keys = '[]', p_missing = '[]';
  -- What another transaction may roll back does not count.
  {{begin_reading}};
  IF p_mode = 'ordered' THEN
    OPEN due;
    walk: LOOP
      FETCH due INTO v_key, v_missing;
      IF v_end OR JSON_LENGTH(p_keys) >= p_limit THEN
        LEAVE walk;
      END IF;
      SET p_keys = JSON_ARRAY_APPEND(p_keys, '$', v_key);
      IF v_missing THEN
        SET p_missing = JSON_ARRAY_APPEND(p_missing, '$', v_key);
      END IF;
    END LOOP;
    CLOSE due;
    SET p_limit = p_limit + JSON_LENGTH(p_keys);
  END IF;
  SELECT MIN(`offset`), MAX(`offset`) INTO v_low, v_high FROM queue_messages;
  -- A seek, registering a group again, and each minute, change this text.
  SELECT CONCAT_WS('/', consumer_group, topic, id, revision, sought_at, v_now DIV 60000, '') INTO v_place
  FROM queue_consumer_groups WHERE consumer_group = p_group AND topic = p_topic;
  IF LEFT(@queue__idle, CHAR_LENGTH(v_place)) = v_place THEN
    SET v_seen = SUBSTRING(@queue__idle, CHAR_LENGTH(v_place) + 1);
    SELECT COUNT(*) = {{page}} OR COALESCE(MAX(topic = p_topic), FALSE) INTO v_new FROM (
      SELECT topic FROM queue_messages WHERE `offset` > v_seen ORDER BY `offset` LIMIT {{page}}
    ) m;
    IF NOT v_new THEN
      SET v_step = 3;
    END IF;
  END IF;
  SET v_low = v_low + FLOOR(RAND() * (v_high - v_low + 1));  -- In a WHERE, RAND() has another value for each row.
  SELECT m.partition_key INTO v_begin FROM (
    SELECT topic, partition_key, priority FROM queue_messages
    WHERE `offset` >= v_low ORDER BY `offset` LIMIT {{look_ahead}}
  ) m WHERE m.topic = p_topic AND m.priority = 0 LIMIT 1;
  WHILE v_step < 3 DO
    CASE IF(v_low_first, 2 - v_step, v_step)
      WHEN 0 THEN
        CALL queue__find_in(
          p_group, p_topic, p_mode, p_me, p_start, p_strict, '{{lanes}}+', '{{lanes}},', TRUE, p_limit, p_keys,
          p_missing, v_work);
      WHEN 1 THEN
        CALL queue__find_in(
          p_group, p_topic, p_mode, p_me, p_start, p_strict, v_begin, '{{lanes}}+', FALSE, p_limit, p_keys,
          p_missing, v_work);
        CALL queue__find_in(
          p_group, p_topic, p_mode, p_me, p_start, p_strict, GREATEST(v_begin, '{{lanes}}.'), {{last_key}}, FALSE,
          p_limit, p_keys, p_missing, v_work);
        CALL queue__find_in(
          p_group, p_topic, p_mode, p_me, p_start, p_strict, '', LEAST(v_begin, '{{lanes}}+'), FALSE, p_limit,
          p_keys, p_missing, v_work);
        CALL queue__find_in(
          p_group, p_topic, p_mode, p_me, p_start, p_strict, '{{lanes}}.', v_begin, FALSE, p_limit, p_keys,
          p_missing, v_work);
      ELSE
        CALL queue__find_in(
          p_group, p_topic, p_mode, p_me, p_start, p_strict, '{{lanes}}-', '{{lanes}}.', FALSE, p_limit, p_keys,
          p_missing, v_work);
    END CASE;
    SET v_step = v_step + 1;
  END WHILE;
  SET @queue__idle = IF(v_work, NULL, CONCAT(v_place, COALESCE(v_high, 0)));
  {{commit}};
END
