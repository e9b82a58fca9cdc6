-- The offset, the token and the partition of a handle. p_key is NULL if there is no such delivery any more.
CREATE PROCEDURE queue__parse(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}},
  OUT p_key {{key}}, OUT p_offset BIGINT, OUT p_token BIGINT
)
  {{attributes}}
BEGIN
  DECLARE v_token DECIMAL(20) DEFAULT 0;
  DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
  IF p_handle IS NULL OR p_handle NOT REGEXP '^[0-9]{1,18}:[1-9][0-9]{0,18}$' THEN
    CALL queue__refuse(
      CONCAT('handle ', COALESCE(QUOTE(p_handle), 'NULL'), ': must be one that queue_claim has returned'));
  END IF;
  SET v_token = SUBSTRING_INDEX(p_handle, ':', -1), p_offset = SUBSTRING_INDEX(p_handle, ':', 1), p_key = NULL;
  IF v_token > 9223372036854775807 OR p_handle <> CONCAT(p_offset, ':', v_token) THEN
    CALL queue__refuse(CONCAT('handle ', QUOTE(p_handle), ': must be one that queue_claim has returned'));
  END IF;
  SET p_token = v_token;
  SELECT partition_key INTO p_key FROM queue_messages WHERE `offset` = p_offset AND topic = p_topic;
  IF p_key IS NULL THEN
    -- The message was deleted from the log while it was in flight.
    SELECT partition_key INTO p_key FROM queue_delivery_state FORCE INDEX (queue_delivery_state_due)
    WHERE consumer_group = p_group AND topic = p_topic AND acked = 0 AND message_offset = p_offset
      AND delivery_token = p_token LIMIT 1;
  END IF;
END
