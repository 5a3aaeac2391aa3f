"""The `tokred` command: evaluation on trained models, speed benchmarks, and looks at what a method keeps."""
