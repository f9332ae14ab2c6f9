"""What can be built: ``envs/`` read into frozen models, and the site's configuration."""
