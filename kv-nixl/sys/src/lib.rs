//! The C API of NIXL, opened at run time: no headers, no bindgen, no C++ compiler, nothing linked.
//!
//! [`Api::open`] looks for `libnixl_capi.so` and gives its functions, or an error that lists every place it looked at.
//! A machine without the library builds and runs everything else.
//!
//! The published crate `nixl-sys` is not used. In its 1.5.2 a missing library or symbol aborts the process at the first
//! call, every call takes a write lock on the agent (a post on one host holds it for the whole copy), and dropping a
//! request lets go of a transfer that is still in progress, whatever the library says of it.
//!
//! # The library's own ways (1.5.1)
//! * Every function returns a [status]; [`status::IN_PROG`] and [`status::SUCCESS`] are no errors.
//! * `create_xfer_req` answers every failure with [`status::BACKEND`].
//! * `release_xfer_req` answers success while the transfer goes on: the memory of both sides stays in use.
//! * Strings and blobs that it hands out are freed with C's `free`: [`free`].
#![deny(unsafe_op_in_unsafe_fn)]

mod find;

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

pub use find::{Place, Tried, places};

/// An opaque handle of the library.
pub type Handle = *mut c_void;

/// `nixl_capi_status_t`.
pub mod status {
    use std::ffi::c_int;

    /// Done.
    pub const SUCCESS: c_int = 0;
    /// A transfer that goes on.
    pub const IN_PROG: c_int = 1;
    /// An argument cannot be right.
    pub const INVALID_PARAM: c_int = -1;
    /// Whatever the backend, or the C++ agent below the C API, refused.
    pub const BACKEND: c_int = -2;
    /// Not in this state.
    pub const INVALID_STATE: c_int = -3;
    /// A C++ exception.
    pub const EXCEPTION: c_int = -4;
    /// Telemetry is off.
    pub const NO_TELEMETRY: c_int = -5;
    /// Unknown: agent, memory, or a handle of an agent generation that is gone.
    pub const NOT_FOUND: c_int = -6;

    /// Its name and number.
    pub fn name(code: c_int) -> &'static str {
        match code {
            SUCCESS => "success (0)",
            IN_PROG => "in progress (1)",
            INVALID_PARAM => "invalid parameter (-1)",
            BACKEND => "backend error (-2)",
            INVALID_STATE => "invalid state (-3)",
            EXCEPTION => "exception (-4)",
            NO_TELEMETRY => "no telemetry (-5)",
            NOT_FOUND => "not found (-6)",
            _ => "a status this version does not know",
        }
    }
}

/// `nixl_capi_mem_type_t`.
pub mod mem {
    use std::ffi::c_int;

    /// Host memory.
    pub const DRAM: c_int = 0;
    /// Device memory.
    pub const VRAM: c_int = 1;
}

/// `nixl_capi_xfer_op_t`: write.
pub const OP_WRITE: c_int = 1;

/// `nixl_capi_thread_sync_t`: calls from several threads, readers side by side.
pub const SYNC_RW: c_int = 2;

/// `nixl_capi_agent_config_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AgentConfig {
    /// The backend's own thread makes progress.
    pub progress_thread: bool,
    /// Listen for metadata exchange.
    pub listen_thread: bool,
    /// Its port.
    pub listen_port: c_int,
    /// How calls of several threads are kept apart.
    pub sync: c_int,
    /// Ignored by the library: a parameter of the backend counts.
    pub workers: u32,
    /// Microseconds between two sweeps of the progress thread; it also wakes for every event. 0 spins.
    pub progress_delay_us: u64,
    /// The same of the listener.
    pub listen_delay_us: u64,
    /// Measure each transfer.
    pub telemetry: bool,
}

/// Why there is no library.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// None of the places has one that can be used.
    #[error("{}", describe(.0))]
    NotFound(Vec<Tried>),
    /// The library of an older or newer release: a function is missing.
    #[error("{} has no function {symbol}: use NIXL 1.5", .path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The library's own stand-in, which does nothing.
    #[error("{} is a stub without function: point KV_NIXL_LIB to the real library", .0.display())]
    Stub(PathBuf),
}

fn describe(tried: &[Tried]) -> String {
    let mut out = String::from("libnixl_capi.so (NIXL 1.5) is not to be had: ");
    for t in tried {
        out.push_str(&t.to_string());
        out.push_str("; ");
    }
    out.push_str(
        "install it (`cargo xtask setup nixl` here, or `pip install --no-deps nixl-cu12==1.5.1`), or set KV_NIXL_LIB to its path",
    );
    out
}

/// Free what the library allocated.
///
/// # Safety
/// `p` came from the library as memory to free, or is null, and is not used again.
pub unsafe fn free(p: *mut c_void) {
    unsafe extern "C" {
        #[link_name = "free"]
        fn c_free(p: *mut c_void);
    }
    // SAFETY: the caller's promise; libc's `free` is in every process.
    unsafe { c_free(p) }
}

macro_rules! api {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*);)*) => {
        /// The library's functions, by their names without `nixl_capi_`. Each returns a [`status`].
        ///
        /// # Safety of all of them
        /// Handles are live and of the right kind, pointers point to what their type says, strings end in 0.
        #[allow(missing_debug_implementations)] // function pointers say nothing
        pub struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) -> c_int,)*
            path: PathBuf,
            // Never closed: the library's threads and destructors outlive every handle.
            _library: std::mem::ManuallyDrop<libloading::Library>,
        }

        impl Api {
            /// # Safety
            /// Running the library's initialisers.
            unsafe fn resolve(library: libloading::Library, path: &Path) -> Result<Self, OpenError> {
                $(
                    // SAFETY: the type is that of wrapper.h.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($arg: $type),*) -> c_int>(
                            concat!("nixl_capi_", stringify!($name), "\0").as_bytes(),
                        )
                    };
                    let Ok($name) = $name.map(|symbol| *symbol) else {
                        return Err(OpenError::Symbol { path: path.into(), symbol: concat!("nixl_capi_", stringify!($name)) });
                    };
                )*
                Ok(Self { $($name,)* path: path.into(), _library: std::mem::ManuallyDrop::new(library) })
            }
        }
    };
}

api! {
    /// Agent of a name.
    create_configured_agent(name: *const c_char, config: *const AgentConfig, agent: *mut Handle);
    /// With everything it still has.
    destroy_agent(agent: Handle);
    /// What a peer loads; freed by [`free`].
    get_local_md(agent: Handle, data: *mut *mut c_void, len: *mut usize);
    /// Learn a peer; its name, freed by [`free`].
    load_remote_md(agent: Handle, data: *const c_void, len: usize, name: *mut *mut c_char);
    /// Forget a peer, and close the endpoint.
    invalidate_remote_md(agent: Handle, name: *const c_char);
    /// Connect now rather than with the first transfer.
    agent_make_connection(agent: Handle, name: *const c_char, options: Handle);
    /// Names of plugins.
    get_available_plugins(agent: Handle, list: *mut Handle);
    /// How many strings.
    string_list_size(list: Handle, size: *mut usize);
    /// One of them; owned by the list.
    string_list_get(list: Handle, index: usize, text: *mut *const c_char);
    /// End of a list.
    destroy_string_list(list: Handle);
    /// Empty parameters.
    create_params(params: *mut Handle);
    /// One more.
    params_add(params: Handle, key: *const c_char, value: *const c_char);
    /// End of parameters.
    destroy_params(params: Handle);
    /// A backend of the agent.
    create_backend(agent: Handle, name: *const c_char, params: Handle, backend: *mut Handle);
    /// Ends the wrapper only; the backend lives with its agent.
    destroy_backend(backend: Handle);
    /// Empty options.
    create_opt_args(options: *mut Handle);
    /// End of options.
    destroy_opt_args(options: Handle);
    /// Use this backend.
    opt_args_add_backend(options: Handle, backend: Handle);
    /// A list of memory to register.
    create_reg_dlist(kind: c_int, list: *mut Handle);
    /// End of a list.
    destroy_reg_dlist(list: Handle);
    /// One more range.
    reg_dlist_add_desc(list: Handle, addr: usize, len: usize, device: u64, meta: *const c_void, meta_len: usize);
    /// Register.
    register_mem(agent: Handle, list: Handle, options: Handle);
    /// End registrations. Peers that know the memory can still write to it.
    deregister_mem(agent: Handle, list: Handle, options: Handle);
    /// A list of memory to move.
    create_xfer_dlist(kind: c_int, list: *mut Handle);
    /// End of a list.
    destroy_xfer_dlist(list: Handle);
    /// One more range.
    xfer_dlist_add_desc(list: Handle, addr: usize, len: usize, device: u64);
    /// Make a list usable by [`Self::make_xfer_req`]; an empty name: local memory.
    prep_xfer_dlist(agent: Handle, name: *const c_char, list: Handle, prepared: *mut Handle, options: Handle);
    /// A transfer of parts of two prepared lists.
    make_xfer_req(agent: Handle, op: c_int, local: Handle, local_indices: *const c_int, local_count: usize,
        remote: Handle, remote_indices: *const c_int, remote_count: usize, request: *mut Handle, options: Handle);
    /// End of a prepared list.
    release_xfer_dlist_handle(agent: Handle, prepared: Handle);
    /// A transfer of two lists.
    create_xfer_req(agent: Handle, op: c_int, local: Handle, remote: Handle, name: *const c_char,
        request: *mut Handle, options: Handle);
    /// Start it.
    post_xfer_req(agent: Handle, request: Handle, options: Handle);
    /// How it stands.
    get_xfer_status(agent: Handle, request: Handle);
    /// Let go of it. Says nothing about whether it goes on.
    release_xfer_req(agent: Handle, request: Handle);
    /// End of a released one's handle.
    destroy_xfer_req(request: Handle);
}

impl Api {
    /// Open the library: `configured` if it is given, else the first that works of [`places`].
    ///
    /// The library runs code when it is opened, and reads the environment (`UCX_*`, `NIXL_*`): set that before.
    ///
    /// # Errors
    /// Every place that was tried and what was wrong with it; nothing else has changed.
    pub fn open(configured: Option<&Path>) -> Result<Self, OpenError> {
        let mut tried = Vec::new();
        for place in places(configured) {
            if let Some(why) = place.absent() {
                tried.push(Tried { place, why });
                continue;
            }
            // SAFETY: the initialisers of NIXL and of the libraries it needs; this is what the caller asked for.
            match unsafe { libloading::Library::new(&place.path) } {
                Ok(library) => {
                    if stub(&library) {
                        return Err(OpenError::Stub(place.path));
                    }
                    // SAFETY: as above.
                    return unsafe { Self::resolve(library, &place.path) };
                }
                Err(e) => {
                    let why = e.to_string();
                    tried.push(Tried { place, why });
                }
            }
        }
        Err(OpenError::NotFound(tried))
    }

    /// The file that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The release, as far as the installation tells: `1.5.1` from `nixl_cu12-1.5.1.dist-info` beside a wheel's files.
    pub fn version(&self) -> Option<String> {
        let site = self.path.parent()?.parent()?;
        let entries = std::fs::read_dir(site).ok()?;
        let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
        let mut versions = names.filter_map(|n| {
            let (package, version) = n.strip_suffix(".dist-info")?.rsplit_once('-')?;
            (package == "nixl" || package.starts_with("nixl_cu")).then(|| version.to_owned())
        });
        versions.next()
    }
}

/// The library's optional `is_stub`.
fn stub(library: &libloading::Library) -> bool {
    // SAFETY: the type is that of wrapper.h; the function reads nothing.
    let is_stub = unsafe { library.get::<unsafe extern "C" fn() -> bool>(b"nixl_capi_is_stub\0") };
    // SAFETY: as above.
    is_stub.is_ok_and(|f| unsafe { f() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_lists_what_was_tried() {
        let Err(OpenError::NotFound(tried)) = Api::open(Some(Path::new("/nowhere/libnixl_capi.so"))) else {
            panic!("found what is not there");
        };
        // Somebody who names a library wants that one.
        assert_eq!(tried.len(), 1);
        let text = OpenError::NotFound(tried).to_string();
        assert!(text.contains("/nowhere/libnixl_capi.so") && text.contains("KV_NIXL_LIB"), "{text}");
    }

    #[test]
    fn a_library_that_is_something_else_is_an_error_that_says_so() {
        let dir = std::env::temp_dir().join(format!("nixl-capi-sys-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("libnixl_capi.so");
        std::fs::write(&file, b"not an ELF file").unwrap();
        let text = Api::open(Some(&file)).err().unwrap().to_string();
        assert!(
            text.contains("libnixl_capi.so") && text.contains("invalid ELF") || text.contains("too short"),
            "{text}"
        );
        // A library without the functions.
        let libc = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6", "/lib64/libm.so.6"];
        if let Some(libm) = libc.iter().map(Path::new).find(|p| p.exists()) {
            let text = Api::open(Some(libm)).err().unwrap().to_string();
            assert!(text.contains("nixl_capi_") && text.contains("NIXL 1.5"), "{text}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
