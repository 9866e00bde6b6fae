"""The parts that every other package of the service uses: errors, settings, logs, parsing, tracing."""
