"""Records, frames and their codec: the one format of the WAL, of the stream to the backend and of a run on disk."""
