-- Report a failed attempt. Returns failed (it is delivered again after p_delay seconds; NULL: after the backoff),
-- dead_lettered (it was the last attempt), or stale.
CREATE PROCEDURE queue_nack(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}}, IN p_error LONGTEXT {{bytewise}},
  IN p_delay DOUBLE
)
  {{attributes}}
BEGIN
  CALL queue__settle(p_group, p_topic, p_handle, 'nack', p_error, p_delay);
END
