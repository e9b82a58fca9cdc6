-- What an ack in a transaction of the client leaves to the next claim: move the watermarks, and give up the leases.
CREATE PROCEDURE queue__sweep(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_mode VARCHAR(10) {{bytewise}}, IN p_me {{key}}
)
  {{attributes}}
BEGIN
  DECLARE v_key, v_owner {{key}};
  DECLARE v_locked BIGINT;
  DECLARE v_end BOOL DEFAULT FALSE;
  DECLARE leased CURSOR FOR
    SELECT partition_key FROM queue_partition_leases FORCE INDEX (queue_leases_owner)
    WHERE leased_by = p_me AND consumer_group = p_group AND topic = p_topic;
  DECLARE settled CURSOR FOR
    SELECT DISTINCT s.partition_key FROM (
      SELECT partition_key FROM queue_delivery_state FORCE INDEX (queue_delivery_state_due)
      WHERE consumer_group = p_group AND topic = p_topic AND acked = 1 LIMIT {{page}}
    ) s;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  IF p_mode = 'ordered' THEN
    OPEN leased;
    walk: LOOP
      SET v_end = FALSE, v_owner = NULL, v_locked = NULL;
      FETCH leased INTO v_key;
      IF v_end THEN
        LEAVE walk;
      END IF;
      SELECT leased_by INTO v_owner FROM queue_partition_leases
      WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
      IF v_owner = p_me THEN
        SELECT offset_acked INTO v_locked FROM queue_offsets
        WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
        IF v_locked IS NOT NULL THEN
          CALL queue__advance(p_group, p_topic, v_key);
          CALL queue__let_go(p_group, p_topic, v_key);
        END IF;
      END IF;
    END LOOP;
    CLOSE leased;
  END IF;
  OPEN settled;
  walk: LOOP
    SET v_end = FALSE, v_locked = NULL;
    FETCH settled INTO v_key;
    IF v_end THEN
      LEAVE walk;
    END IF;
    SELECT offset_acked INTO v_locked FROM queue_offsets
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = v_key FOR UPDATE SKIP LOCKED;
    IF v_locked IS NOT NULL THEN
      CALL queue__advance(p_group, p_topic, v_key);
    END IF;
  END LOOP;
  CLOSE settled;
END
