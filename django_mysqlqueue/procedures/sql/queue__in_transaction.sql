-- Whether the caller has an open transaction. Without one, a savepoint is forgotten at once.
CREATE PROCEDURE queue__in_transaction(OUT p_inside BOOL)
  {{attributes}}
BEGIN
  DECLARE CONTINUE HANDLER FOR 1305 SET p_inside = FALSE;
  SET p_inside = TRUE;
  SAVEPOINT queue__probe;
  ROLLBACK TO SAVEPOINT queue__probe;
  IF p_inside THEN
    RELEASE SAVEPOINT queue__probe;
  END IF;
END
