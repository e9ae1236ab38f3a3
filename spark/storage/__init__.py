"""Where audits keep their files: a local folder, or any file system that Hadoop knows."""
