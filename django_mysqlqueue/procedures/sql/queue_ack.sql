-- Ack a delivery: in your transaction if one is open. Returns acked, or stale: then nothing was changed.
CREATE PROCEDURE queue_ack(IN p_group {{group}}, IN p_topic {{topic}}, IN p_handle VARCHAR(100) {{bytewise}})
  {{attributes}}
BEGIN
  CALL queue__settle(p_group, p_topic, p_handle, 'ack', NULL, NULL);
END
