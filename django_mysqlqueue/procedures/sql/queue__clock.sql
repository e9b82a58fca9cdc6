-- Read the server's clock into @queue__now, in epoch milliseconds, whatever the session has set. NOW() and
-- UTC_TIMESTAMP() follow SET timestamp. SYSDATE() does not, but it is in the session's time zone, in which an hour may
-- come twice: so the statement has another one, which ends with it, even if it is killed.
CREATE PROCEDURE queue__clock()
  {{attributes}}
BEGIN
  DECLARE v_at DATETIME(6);
  DECLARE v_zone VARCHAR(100) {{bytewise}};
  {{select_in_utc}} SYSDATE(6), @@SESSION.time_zone INTO v_at, v_zone;
  IF v_zone <> '+00:00' THEN
    CALL queue__refuse(CONCAT(
      'The procedures were created without their comments, which contain a hint: ',
      'run queueprocedures, or pass --comments to mysql'
    ));
  END IF;
  SET @queue__now = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', v_at) DIV 1000;
END
