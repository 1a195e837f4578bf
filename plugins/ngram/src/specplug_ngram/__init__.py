"""NGRAM for specplug: drafts by looking up what followed the same tokens earlier in the request."""
