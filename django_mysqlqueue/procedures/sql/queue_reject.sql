-- Dead-letter a delivery at once. Returns dead_lettered (on a DLQ topic: failed), or stale.
CREATE PROCEDURE queue_reject(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}}, IN p_error LONGTEXT {{bytewise}}
)
  {{attributes}}
BEGIN
  CALL queue__settle(p_group, p_topic, p_handle, 'reject', p_error, NULL);
END
