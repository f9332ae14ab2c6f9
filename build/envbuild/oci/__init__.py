"""OCI images: documents, layouts, archives, blobs, pulls and writes. The one package that knows the formats."""
