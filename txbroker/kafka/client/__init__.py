"""A client of Kafka: connections, logins, requests, producers and group members."""
