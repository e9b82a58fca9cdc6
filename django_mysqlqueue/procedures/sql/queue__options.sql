-- The state of a group, and its options as JSON, of which all values are texts: overrides first, then those of the
-- code. p_mode is NULL if the group is not registered. With p_claims, the row is locked shared until the COMMIT (the
-- fence), and a group with rules that only subscribers in Python apply is refused.
CREATE PROCEDURE queue__options(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_claims BOOL,
  OUT p_mode VARCHAR(10) {{bytewise}}, OUT p_paused BOOL, OUT p_start BIGINT, OUT p_options TEXT {{bytewise}}
)
  {{attributes}}
BEGIN
  DECLARE v_limits, v_filter, v_users, v_overrides, v_code, v_found TEXT {{bytewise}};
  DECLARE v_allowed INT DEFAULT 0;
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET p_mode = NULL;
  SET p_mode = NULL;
  IF p_claims THEN
    SELECT mode, paused, start_offset, limits, filter, allowed_users, overrides
    INTO p_mode, p_paused, p_start, v_limits, v_filter, v_users, v_overrides
    FROM queue_consumer_groups WHERE consumer_group = p_group AND topic = p_topic LOCK IN SHARE MODE;
  ELSE
    SELECT mode, paused, start_offset, limits, filter, allowed_users, overrides
    INTO p_mode, p_paused, p_start, v_limits, v_filter, v_users, v_overrides
    FROM queue_consumer_groups WHERE consumer_group = p_group AND topic = p_topic;
  END IF;
  SET v_code = {{code_options}};
  SET p_options = JSON_OBJECT(
    'max_attempts', {{option.max_attempts}},
    'visibility_timeout', {{option.visibility_timeout}},
    'initial', {{option.backoff.initial}},
    'factor', {{option.backoff.factor}},
    'maximum', {{option.backoff.maximum}},
    'jitter', {{option.backoff.jitter}},
    'on_failure', JSON_UNQUOTE(JSON_EXTRACT(v_code, '$.on_failure')),
    'on_expiry', JSON_UNQUOTE(JSON_EXTRACT(v_code, '$.on_expiry')),
    'record', JSON_UNQUOTE(JSON_EXTRACT(v_code, '$.record')));
  IF p_claims AND p_mode IS NOT NULL THEN
    SET v_found = COALESCE(JSON_EXTRACT(v_overrides, '$.allowed_users.value'),
      IF(v_users = '{}', 'null', COALESCE(JSON_EXTRACT(v_users, '$.users'), '[]')));
    IF v_found <> 'null' THEN
      SELECT COUNT(*) INTO v_allowed
      FROM JSON_TABLE(v_found, '$[*]' COLUMNS (pattern VARCHAR(350) {{bytewise}} PATH '$')) p
      WHERE USER() LIKE REPLACE(REPLACE(p.pattern, '!', '!!'), '_', '!_') ESCAPE '!';
      IF v_allowed = 0 THEN
        CALL queue__refuse(CONCAT(p_group, ' on ', p_topic, ' is for other database users than ', USER()));
      END IF;
    END IF;
    SET v_found = COALESCE({{override.filter}}, v_filter);
    IF v_found NOT IN ('{}', 'null') THEN
      CALL queue__refuse(CONCAT(p_group, ' on ', p_topic, ' has a filter, which only subscribers in Python apply'));
    END IF;
    SET v_found = CONCAT_WS(', ', {{refused_limits}});
    IF v_found <> '' THEN
      CALL queue__refuse(
        CONCAT(p_group, ' on ', p_topic, ' has limits that only subscribers in Python keep: ', v_found));
    END IF;
  END IF;
END
