"""PostgreSQL's replication protocol, its output plugin and its catalogs."""
