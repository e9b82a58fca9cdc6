-- The wait after a failed or lost attempt, in milliseconds (backoff.Backoff.delay).
CREATE PROCEDURE queue__backoff(IN p_attempts INT, IN p_options TEXT {{bytewise}}, OUT p_wait DOUBLE)
  {{attributes}}
BEGIN
  -- With the highest factor, 1000, a higher exponent could be too large for a DOUBLE.
  SET p_wait = JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.initial'))
    * POW(JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.factor')), LEAST(p_attempts - 1, 60));
  -- MySQL compares as text if one of them is text: 4 would be more than 3600.
  SET p_wait = 1000 * LEAST(p_wait, JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.maximum')) + 0)
    * (1 + JSON_UNQUOTE(JSON_EXTRACT(p_options, '$.jitter')) * (2 * RAND() - 1));
END
