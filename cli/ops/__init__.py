"""Commands for operators: topics, groups, principals, repair, top."""
