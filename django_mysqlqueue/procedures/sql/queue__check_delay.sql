-- Refuse a delay that subscribers in Python could not have, either.
CREATE PROCEDURE queue__check_delay(IN p_name VARCHAR(10) {{bytewise}}, IN p_delay DOUBLE)
  {{attributes}}
BEGIN
  IF p_delay < 0 OR p_delay > {{longest_delay}} THEN
    CALL queue__refuse(CONCAT(p_name, ' ', p_delay, ': must be 0 to {{longest_delay}} seconds'));
  END IF;
END
