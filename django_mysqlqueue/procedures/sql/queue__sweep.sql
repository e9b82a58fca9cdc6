-- What an outcome in a transaction of a client leaves to the next claim, of any connection: move the watermarks, and
-- give the partition back.
CREATE PROCEDURE queue__sweep(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_mode VARCHAR(10) {{bytewise}}
)
  {{attributes}}
BEGIN
  DECLARE v_key, v_owner {{key}};
  DECLARE v_locked, v_first, v_last BIGINT;
  DECLARE v_from BIGINT DEFAULT 0;
  DECLARE v_place, v_rows INT DEFAULT 0;
  DECLARE v_end BOOL DEFAULT FALSE;
  DECLARE v_keys, v_owners LONGTEXT {{bytewise}} DEFAULT '[]';
  DECLARE settled CURSOR FOR
    SELECT s.partition_key FROM (
      SELECT partition_key FROM queue_delivery_state FORCE INDEX (queue_delivery_state_due)
      WHERE consumer_group = p_group AND topic = p_topic AND acked = 1 AND invisible_until >= v_from
      ORDER BY invisible_until LIMIT {{page}}
    ) s
    UNION
    (SELECT l.partition_key FROM queue_partition_leases l FORCE INDEX (queue_leases_owner)
     WHERE p_mode = 'ordered' AND l.leased_by >= 'sql:' AND l.leased_by < 'sql;' AND l.consumer_group = p_group
       AND l.topic = p_topic AND NOT EXISTS (
         SELECT 1 FROM queue_delivery_state s FORCE INDEX (PRIMARY)
         WHERE s.consumer_group = p_group AND s.topic = p_topic AND s.partition_key = l.partition_key AND s.acked = 0
           AND s.delivery_token <> 0
       )
     LIMIT {{page}})
    ORDER BY partition_key;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  {{on_error}};
  SELECT COUNT(*) INTO v_rows FROM (
    SELECT 1 FROM queue_delivery_state FORCE INDEX (queue_delivery_state_due)
    WHERE consumer_group = p_group AND topic = p_topic AND acked = 1 LIMIT {{page}}
  ) s;
  IF v_rows = {{page}} THEN
    -- Many, perhaps behind one message that waits: from a random place, so that others are found, too.
    SELECT MIN(invisible_until), MAX(invisible_until) INTO v_first, v_last
    FROM queue_delivery_state FORCE INDEX (queue_delivery_state_due)
    WHERE consumer_group = p_group AND topic = p_topic AND acked = 1;
    SET v_from = v_first + FLOOR(RAND() * (v_last - v_first + 1));
  END IF;
  OPEN settled;
  walk: LOOP
    FETCH settled INTO v_key;
    IF v_end THEN
      LEAVE walk;
    END IF;
    SET v_keys = JSON_ARRAY_APPEND(v_keys, '$', v_key);
  END LOOP;
  CLOSE settled;
  IF JSON_LENGTH(v_keys) > 0 THEN
    {{begin}};
    -- All leases first, and in order of key: on MariaDB, SKIP LOCKED waits for a moment, in which others may find a
    -- deadlock.
    WHILE p_mode = 'ordered' AND v_place < JSON_LENGTH(v_keys) DO
      SET v_key = JSON_UNQUOTE(JSON_EXTRACT(v_keys, CONCAT('$[', v_place, ']'))), v_owner = '';
      SELECT leased_by INTO v_owner FROM queue_partition_leases
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
      SET v_owners = JSON_ARRAY_APPEND(v_owners, '$', v_owner), v_place = v_place + 1;
    END WHILE;
    SET v_place = 0;
    WHILE v_place < JSON_LENGTH(v_keys) DO
      SET v_key = JSON_UNQUOTE(JSON_EXTRACT(v_keys, CONCAT('$[', v_place, ']'))), v_locked = NULL;
      SELECT offset_acked INTO v_locked FROM queue_offsets
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
      IF v_locked IS NOT NULL THEN
        CALL queue__advance(p_group, p_topic, v_key);
        IF JSON_UNQUOTE(JSON_EXTRACT(v_owners, CONCAT('$[', v_place, ']'))) LIKE 'sql:%' THEN
          CALL queue__let_go(p_group, p_topic, v_key);
        END IF;
      END IF;
      SET v_place = v_place + 1;
    END WHILE;
    {{commit}};
  END IF;
END
