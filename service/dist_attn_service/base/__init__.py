"""What every room of the service uses: errors, settings, logs, parsing, tracing."""
