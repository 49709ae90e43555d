"""Tool manifests: documents, checks, pins and reports."""
