-- An error with the SQLSTATE 45000. MESSAGE_TEXT has room for 128 characters.
CREATE PROCEDURE queue__refuse(IN p_text TEXT {{bytewise}})
  {{attributes}}
BEGIN
  DECLARE v_text VARCHAR(128) {{bytewise}} DEFAULT LEFT(p_text, 128);
  SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_text;
END
