"""Images as others hand them over: folders of envbuild, OCI layouts, archives and .sqsh files, read in one way."""
