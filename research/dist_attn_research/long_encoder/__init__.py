"""The long encoder: a recurrent student of a sentence encoder that reads a stream of any length."""
