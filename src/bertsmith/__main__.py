"""Entry point of `python -m bertsmith` and of `accelerate launch -m bertsmith`."""

from bertsmith.cli import main

if __name__ == "__main__":
    main()
