-- Claim at most p_limit messages of a topic for a consumer group, and return them: one row for each.
CREATE PROCEDURE queue_claim(IN p_group {{group}}, IN p_topic {{topic}}, IN p_limit INT)
  {{attributes}}
BEGIN
  CALL queue__deliver(p_group, p_topic, p_limit);
END
