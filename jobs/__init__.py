"""The command line: thin click commands over the pipeline, each loaded when it is called."""
