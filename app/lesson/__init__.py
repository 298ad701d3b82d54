"""The one shape of all lessons; what each of them teaches lies in app.learn."""
