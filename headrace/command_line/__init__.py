"""The flags of every command: one table, three sources, and an answer to other servers' spellings."""
