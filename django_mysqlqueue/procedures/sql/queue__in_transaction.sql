-- Whether the caller has an open transaction. Without one, a savepoint is forgotten at once. @queue__open is set while
-- a procedure has one of its own. If a statement is killed (KILL QUERY), servers may run no handler, and it stays open.
CREATE PROCEDURE queue__in_transaction(OUT p_inside BOOL)
  {{attributes}}
BEGIN
  DECLARE CONTINUE HANDLER FOR 1305 SET p_inside = FALSE;
  SET p_inside = TRUE;
  SAVEPOINT queue__probe;
  ROLLBACK TO SAVEPOINT queue__probe;
  IF p_inside THEN
    RELEASE SAVEPOINT queue__probe;
    IF @queue__open THEN
      CALL queue__refuse('The last call was killed in its transaction. ROLLBACK, or close the connection');
    END IF;
  END IF;
  SET @queue__open = NULL;
END
