-- Move the watermark of a partition, whose row of queue_offsets is locked, beyond its settled messages, and delete
-- their rows: by their primary keys, because a range would lock the row after it, too.
CREATE PROCEDURE queue__advance(IN p_group {{group}}, IN p_topic {{topic}}, IN p_key {{key}})
  {{attributes}}
BEGIN
  DECLARE v_acked, v_claimed, v_watermark, v_offset, v_locked BIGINT;
  DECLARE v_settled BOOL;
  DECLARE v_deleted INT DEFAULT 0;
  DECLARE v_end BOOL DEFAULT FALSE;
  DECLARE settled CURSOR FOR
    SELECT message_offset, acked FROM queue_delivery_state FORCE INDEX (PRIMARY)
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset > v_acked
    ORDER BY message_offset LIMIT {{look_ahead}};
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  SELECT offset_acked, offset_claimed INTO v_acked, v_claimed FROM queue_offsets
  WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  SET v_watermark = v_claimed;
  OPEN settled;
  walk: LOOP
    FETCH settled INTO v_offset, v_settled;
    IF v_end THEN
      LEAVE walk;
    END IF;
    IF NOT v_settled OR v_offset > v_claimed THEN
      SET v_watermark = LEAST(v_offset - 1, v_claimed);
      LEAVE walk;
    END IF;
    -- A transaction that acks a second time may have locked it.
    SELECT message_offset INTO v_locked FROM queue_delivery_state
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = v_offset
    FOR UPDATE SKIP LOCKED;
    IF v_end THEN
      SET v_watermark = v_offset - 1;
      LEAVE walk;
    END IF;
    DELETE FROM queue_delivery_state
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key AND message_offset = v_offset;
    SET v_deleted = v_deleted + 1;
    IF v_deleted = {{look_ahead}} THEN
      SET v_watermark = LEAST(v_offset, v_claimed);
    END IF;
  END LOOP;
  CLOSE settled;
  IF v_watermark > v_acked THEN
    UPDATE queue_offsets SET offset_acked = v_watermark, updated_at = {{now}}
    WHERE consumer_group = p_group AND topic = p_topic AND partition_key = p_key;
  END IF;
END
