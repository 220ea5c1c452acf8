#!/bin/sh
# The tables, a worker and the site. Ctrl-C stops both.
set -e
cd "$(dirname "$0")"
python manage.py migrate
python manage.py fairlane worker &
worker=$!
trap 'kill "$worker" "$site" 2>/dev/null || true; wait' INT TERM EXIT
python -m uvicorn shop.asgi:application --port "${PORT:-8000}" &
site=$!
wait "$site"
