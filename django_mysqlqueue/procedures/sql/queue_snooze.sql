-- Deliver a message again in some seconds, without counting an attempt; 0: at once. Returns snoozed, or stale.
CREATE PROCEDURE queue_snooze(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}}, IN p_delay DOUBLE
)
  {{attributes}}
BEGIN
  CALL queue__settle(p_group, p_topic, p_handle, 'snooze', NULL, p_delay);
END
