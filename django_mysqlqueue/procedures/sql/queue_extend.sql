-- Hold a delivery for some more seconds from now; in an ordered group, its partition for the duration of a lease.
-- Returns extended, or stale: then another consumer may have it.
CREATE PROCEDURE queue_extend(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}}, IN p_seconds DOUBLE
)
  {{attributes}}
BEGIN
  CALL queue__extend(p_group, p_topic, p_handle, p_seconds);
END
