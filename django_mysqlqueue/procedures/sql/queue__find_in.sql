-- Add partitions with messages above a group's position that are free for this consumer to p_keys: those whose keys are
-- at least p_from and less than p_to. It reads one entry of the index for each partition, page by page. p_work: whether
-- any, free or not, has such messages.
CREATE PROCEDURE queue__find_in(
  IN p_group {{group}}, IN p_topic {{topic}}, IN p_mode VARCHAR(10) {{bytewise}}, IN p_me {{key}}, IN p_start BIGINT,
  IN p_strict BOOL, IN p_from VARCHAR(200) {{bytewise}}, IN p_to VARCHAR(200) {{bytewise}}, IN p_descending BOOL,
  IN p_limit INT,
  INOUT p_keys LONGTEXT {{bytewise}}, INOUT p_missing LONGTEXT {{bytewise}}, INOUT p_work BOOL
)
  {{attributes}}
BEGIN
  DECLARE v_key {{key}};
  DECLARE v_work, v_free, v_missing, v_end BOOL;
  DECLARE v_rows, v_page INT DEFAULT {{first_page}};
  DECLARE v_now BIGINT DEFAULT {{now}};
  DECLARE up CURSOR FOR {{partitions.ASC}};
  DECLARE down CURSOR FOR {{partitions.DESC}};
  DECLARE CONTINUE HANDLER FOR NOT FOUND SET v_end = TRUE;
  WHILE v_rows = v_page AND JSON_LENGTH(p_keys) < p_limit DO
    -- The first page is small, because it often suffices.
    SET v_page = IF(v_key IS NULL, {{first_page}}, {{page}}), v_rows = 0, v_end = FALSE;
    IF p_descending THEN
      OPEN down;
    ELSE
      OPEN up;
    END IF;
    page: LOOP
      IF p_descending THEN
        FETCH down INTO v_key, v_work, v_free, v_missing;
      ELSE
        FETCH up INTO v_key, v_work, v_free, v_missing;
      END IF;
      IF v_end THEN
        LEAVE page;
      END IF;
      SET v_rows = v_rows + 1, p_work = p_work OR v_work;
      IF v_work AND v_free AND JSON_LENGTH(p_keys) < p_limit THEN
        SET p_keys = JSON_ARRAY_APPEND(p_keys, '$', v_key);
        IF v_missing THEN
          SET p_missing = JSON_ARRAY_APPEND(p_missing, '$', v_key);
        END IF;
      END IF;
    END LOOP;
    IF p_descending THEN
      CLOSE down;
      SET p_to = v_key;
    ELSE
      CLOSE up;
      SET p_from = CONCAT(v_key, CHAR(0 USING utf8mb4));
    END IF;
  END WHILE;
END
