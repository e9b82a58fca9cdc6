-- When a message expires, in epoch milliseconds; NULL: never. Copies do not expire, and values that are no times do not
-- count. A message with a coalesce key is refused: which of them is the latest, only subscribers in Python decide.
CREATE PROCEDURE queue__expiry(
  IN p_metadata MEDIUMTEXT {{bytewise}}, IN p_created_at BIGINT, IN p_original_id {{key}}, OUT p_expires_at BIGINT
)
  {{attributes}}
BEGIN
  DECLARE v_at, v_in TEXT {{bytewise}};
  SET p_expires_at = NULL;
  IF p_original_id = '' AND p_metadata LIKE '%"mysqlqueue.%'
     AND JSON_EXTRACT(p_metadata, '$."{{replaces}}"') IS NULL THEN
    IF JSON_TYPE(JSON_EXTRACT(p_metadata, '$."{{coalesce}}"')) = 'STRING'
       AND CHAR_LENGTH(JSON_UNQUOTE(JSON_EXTRACT(p_metadata, '$."{{coalesce}}"'))) BETWEEN 1 AND {{key_length}} THEN
      CALL queue__refuse('A message has a coalesce key, which only subscribers in Python apply');
    END IF;
    SET v_at = JSON_EXTRACT(p_metadata, '$."{{expires_at}}"'), v_in = JSON_EXTRACT(p_metadata, '$."{{expires_in}}"');
    IF v_at REGEXP '^[0-9]{1,15}$' AND v_at + 0 BETWEEN 1 AND {{latest_delivery}} THEN
      SET p_expires_at = v_at + 0;
    ELSEIF v_in REGEXP '^[0-9]{1,15}$' AND v_in + 0 BETWEEN 1 AND {{latest_delivery}}
           AND p_created_at + v_in <= {{latest_delivery}} THEN
      SET p_expires_at = p_created_at + v_in;
    END IF;
  END IF;
END
